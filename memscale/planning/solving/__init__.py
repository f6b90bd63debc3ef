"""The integer program that chooses one candidate for each part: least time, with bytes below a limit everywhere."""
