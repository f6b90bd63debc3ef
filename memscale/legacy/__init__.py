"""The older one-line style: `wrap`, `optimize`, `detach`."""
