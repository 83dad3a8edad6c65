"""Questions about images of shapes: a world for vision-language models."""
