"""What a run leaves and prints: scores, the log of its rounds, the plot and the summary."""
