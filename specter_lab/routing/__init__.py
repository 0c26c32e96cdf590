"""Which experts the routers pick: recording it, predicting it, generating it."""
