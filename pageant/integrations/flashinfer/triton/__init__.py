"""FlashInfer's folder of that name; what is in it is not written in Triton here."""
