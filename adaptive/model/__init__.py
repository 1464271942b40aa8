"""One model: its replica, the state of its parameters, and the checks of saved states."""
