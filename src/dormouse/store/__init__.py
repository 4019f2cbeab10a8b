"""Images: their format, the shared DRAM arena, the disk tier. No torch."""
