"""jaxrt: a runtime for language models written as pure JAX functions."""

__version__ = "0.1.0"
