"""What unified models share whose words and images lie end to end in one row: BAGEL and HunyuanImage3."""
