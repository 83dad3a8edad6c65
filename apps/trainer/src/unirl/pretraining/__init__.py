"""What the scripts that make the bases of the small worlds share."""
