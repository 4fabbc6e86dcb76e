"""The global model and the outer step that moves it, with the same bits on every machine."""
