"""A choice of one candidate for each part, as an integer program: least time, with bytes below a limit everywhere."""
