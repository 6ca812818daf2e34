"""What a run tells the outside: Prometheus, TensorBoard, MLPerf lines, its status file."""
