"""The one room that knows Hugging Face: configurations, skeletons, plans and weights."""
