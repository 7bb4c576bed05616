"""What others decode on a CPU, beside ours: OpenVINO GenAI and llama.cpp, each in a process of its own."""
