"""What was used, by whom, and what it costs: a durable ledger, tariffs, and bills from them."""
