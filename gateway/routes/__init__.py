"""HTTP handlers, one file a group of routes; the table of routes is in `app.py`."""
