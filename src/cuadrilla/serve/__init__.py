"""Trained models as a service: OpenAI's completions, predictions of a user's task, a page to try them, metrics."""
