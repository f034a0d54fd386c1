"""Data sets, their split over users, rotation and augmentation."""
