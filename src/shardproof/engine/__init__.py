"""The engine for one checkpoint: from live state to verified bytes in a storage, and back."""
