"""The wire formats: how indices, values and small whole numbers become bytes, and back."""
