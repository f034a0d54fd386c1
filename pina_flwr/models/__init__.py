"""The frozen backbone, its trainable tail, and adapters as flat vectors."""
