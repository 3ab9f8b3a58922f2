"""What a loss is a mean over, found out once, so that ranks weigh their samples rightly."""
