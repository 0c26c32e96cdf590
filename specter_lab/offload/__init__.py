"""Where experts are: the host's store, the device's slots, who is forgotten, what is fetched ahead."""
