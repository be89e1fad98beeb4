"""A trained model as a service: the OpenAI-compatible API, several services behind one address, honest load tests."""
