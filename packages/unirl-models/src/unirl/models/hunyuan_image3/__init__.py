"""HunyuanImage3: one mixture-of-experts transformer that reads text and images, writes text and makes images."""
