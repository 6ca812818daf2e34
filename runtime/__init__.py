"""Run a plan: process groups, Ray, launching, profiling and the command line."""
