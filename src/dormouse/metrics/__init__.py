"""What Prometheus is told: the books as it reads them, edges of its histograms, its text. Knows no server."""
