"""The models that are trained: raptr's own, whose forward takes a subnetwork, and `attach` for other people's."""
