"""Scorers that read the text in an image (extras `ocr`, `got-ocr`, `paddleocr`)."""
