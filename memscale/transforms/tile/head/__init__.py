"""The loss head in pieces: a projection that is deferred until somebody needs its result."""
