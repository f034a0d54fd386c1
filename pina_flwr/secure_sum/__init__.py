"""Secure sum: vectors in, their sum and who survived out, and nothing more."""
