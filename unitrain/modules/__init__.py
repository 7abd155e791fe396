"""What is done to the user's modules beside training them."""
