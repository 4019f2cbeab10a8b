"""Who asks, what they may see, and how much they may ask. Knows neither HTTP nor gRPC, and no function's inside."""
