"""Who is trained: models whose forward takes the step's subnetwork, and attach() for other people's."""
