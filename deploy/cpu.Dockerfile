# A server on CPUs. The C++ compiler builds kernels at the first start.
# Build it in the repository: docker build -f deploy/cpu.Dockerfile -t jaxsgl:cpu .
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,target=/src,rw pip install --no-cache-dir /src
# A new volume at .cache gets the owner and the mode that the folder has here.
RUN useradd --create-home --uid 10001 jaxsgl && install -d -m 700 -o jaxsgl -g jaxsgl /home/jaxsgl/.cache
USER 10001
ENTRYPOINT ["python", "-m", "jaxsgl.serve", "--host", "0.0.0.0"]
