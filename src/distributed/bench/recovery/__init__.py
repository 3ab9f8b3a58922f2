"""What a killed rank costs, beside torchrun."""
