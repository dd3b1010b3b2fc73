"""Schedule x Prices to Timeline: what would run when."""

from hocket.simulation.durations import durations
from hocket.simulation.measured import measured_prices
from hocket.simulation.simulate import simulate, theoretical_bubble

__all__ = ["durations", "measured_prices", "simulate", "theoretical_bubble"]
