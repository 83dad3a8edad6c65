"""What one package needs of another. Implementations live in the packages; recipes join them."""
