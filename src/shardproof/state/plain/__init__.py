"""Plain data as JSON values, and back."""
