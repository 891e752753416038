"""A request's images: from data URLs, local files and listed hosts to places in the prompt."""
