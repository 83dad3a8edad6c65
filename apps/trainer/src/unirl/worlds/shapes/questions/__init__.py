"""Questions about pictures of shapes: a world for vision-language models."""
