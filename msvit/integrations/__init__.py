"""Other packages: the Hugging Face hub, transformers, ONNX. Each module is imported only where it is used."""
