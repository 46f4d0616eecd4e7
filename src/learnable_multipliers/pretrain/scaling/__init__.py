"""What a train step costs on many ranks, on paper: bytes, messages and seconds."""
