# A server on CPUs. The C++ compiler builds kernels at the first start.
# Build it in the repository: docker build -f deploy/cpu.Dockerfile -t jaxsgl:cpu .
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir /src && rm -r /src && useradd --create-home --uid 10001 jaxsgl
USER 10001
ENTRYPOINT ["python", "-m", "jaxsgl.serve", "--host", "0.0.0.0"]
