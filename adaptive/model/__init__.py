"""One model: its replica, its parameters, and what is saved of them."""
