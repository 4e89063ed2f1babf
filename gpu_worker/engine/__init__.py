"""The synchronous engine: sequences, blocks and the plan of each step. No asyncio, no redis, no clock."""
