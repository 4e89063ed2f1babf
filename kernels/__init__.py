"""The operations a model step is made of: contract, torch reference and fast paths, one file an op."""

__version__ = "0.0.0"  # transformers probes for a Hugging Face package of this name and reads its version
