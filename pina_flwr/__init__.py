"""PINA: differentially private clustered federated learning as a Flower application (arXiv 2604.20596)."""

__version__ = "0.1.0"
