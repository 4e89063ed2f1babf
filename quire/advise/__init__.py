"""`quire advise`: what to set on a system that runs, by what its own metrics say."""
