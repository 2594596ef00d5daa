"""rlsys: RLHF training with one controller and Ray worker groups."""
