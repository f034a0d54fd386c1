"""User-level differential privacy: releases, their accounting, the noise and what is guaranteed to whom."""
