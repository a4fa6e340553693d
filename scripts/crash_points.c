/* Preloaded into a process by crash_points.py: counts the calls that change files below one folder, writes each into a
   trace, and at a chosen one kills the process or fails it. A write that is killed is done by half first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long count, at = -1;
static int number, sticky, trace = -1;
static char only[32];

/* From now on: calls below `folder`, whose names begin with `kind` ("" is all), are counted; the one numbered `n`
   (from 1; 0 is none), and with `again` all that follow, fail with errno `error`; 0 kills, -1 stops until the process is continued. */
void crash_arm(const char *folder, const char *kind, long n, int error, int again, int trace_to) {
  snprintf(only, sizeof only, "%s", kind);
  count = 0, at = n, number = error, sticky = again, trace = trace_to;
  snprintf(root, sizeof root, "%s", folder);
}

static int below(const char *path) {
  size_t length = strlen(root);
  return length && path && !strncmp(path, root, length);
}

static const char *named(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  path[length < 0 ? 0 : length] = 0;
  return path;
}

/* 0: go on. 1: fail with errno. 2: to be killed. */
static int point(const char *call, const char *path) {
  if (!below(path) || strncmp(call, only, strlen(only))) return 0;
  count++;
  if (trace >= 0) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s\t%s\n", call, path);
    syscall(SYS_write, trace, line, length);
  }
  if (at < 1 || (sticky ? count < at : count != at)) return 0;
  if (number < 0) return kill(getpid(), SIGSTOP), 0;
  // A full disk gives room back.
  if (number == ENOSPC && (!strncmp(call, "un", 2) || !strcmp(call, "rmdir") || !strcmp(call, "chmod"))) return 0;
  if (number) return errno = number, 1;
  return 2;
}

static void die(void) { kill(getpid(), SIGKILL); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CHECK(call, path)        \
  switch (point(call, path)) {   \
    case 1: return -1;           \
    case 2: die();               \
  }
/* A write of `size` bytes: half of it, then the end. */
#define HALVED(call, fd, size, half)          \
  char path[PATH_MAX];                        \
  int what = point(call, named(fd, path));    \
  if (what == 1) return -1;                   \
  if (what == 2) {                            \
    if (size > 1) (void)!half;                \
    die();                                    \
  }

ssize_t write(int fd, const void *data, size_t size) {
  HALVED("write", fd, size, REAL(write)(fd, data, size / 2))
  return REAL(write)(fd, data, size);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  HALVED("write", fd, size, REAL(pwrite64)(fd, data, size / 2, offset))
  return REAL(pwrite64)(fd, data, size, offset);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }
ssize_t writev(int fd, const struct iovec *parts, int number_of_parts) {
  HALVED("write", fd, number_of_parts, REAL(writev)(fd, parts, number_of_parts / 2))
  return REAL(writev)(fd, parts, number_of_parts);
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
  HALVED("write", out, size, REAL(sendfile64)(out, in, offset, size < 8192 ? size / 2 : 4096))
  return REAL(sendfile64)(out, in, offset, size);
}
ssize_t sendfile(int out, int in, off_t *offset, size_t size) { return sendfile64(out, in, offset, size); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
  HALVED("write", out, size, REAL(copy_file_range)(in, from, out, to, size < 8192 ? size / 2 : 4096, flags))
  return REAL(copy_file_range)(in, from, out, to, size, flags);
}

#define ON_FD(call, result, name, parameters, ...) \
  result name parameters {                         \
    char path[PATH_MAX];                           \
    CHECK(call, named(fd, path))                   \
    return REAL(name)(__VA_ARGS__);                \
  }
ON_FD("fsync", int, fsync, (int fd), fd)
ON_FD("fsync", int, fdatasync, (int fd), fd)
ON_FD("truncate", int, ftruncate, (int fd, off_t size), fd, size)
ON_FD("truncate", int, ftruncate64, (int fd, off64_t size), fd, size)
ON_FD("allocate", int, fallocate, (int fd, int mode, off_t offset, off_t size), fd, mode, offset, size)

int msync(void *address, size_t size, int flags) {
  CHECK("msync", root)
  return REAL(msync)(address, size, flags);
}

#define ON_PATH(call, name, parameters, path, ...) \
  int name parameters {                            \
    CHECK(call, path)                              \
    return REAL(name)(__VA_ARGS__);                \
  }
ON_PATH("rename", rename, (const char *a, const char *b), b, a, b)
ON_PATH("rename", renameat, (int from, const char *a, int to, const char *b), b, from, a, to, b)
ON_PATH("renameat2", renameat2, (int from, const char *a, int to, const char *b, unsigned f), b, from, a, to, b, f)
ON_PATH("link", link, (const char *a, const char *b), b, a, b)
ON_PATH("unlink", unlink, (const char *a), a, a)
ON_PATH("rmdir", rmdir, (const char *a), a, a)
ON_PATH("mkdir", mkdir, (const char *a, mode_t mode), a, a, mode)
ON_PATH("chmod", chmod, (const char *a, mode_t mode), a, a, mode)

int unlinkat(int folder, const char *name, int flags) {
  char path[2 * PATH_MAX];
  if (name[0] != '/') {
    named(folder, path);
    strncat(path, "/", sizeof path - strlen(path) - 1);
    strncat(path, name, sizeof path - strlen(path) - 1);
  } else {
    snprintf(path, sizeof path, "%s", name);
  }
  CHECK("unlink", path)
  return REAL(unlinkat)(folder, name, flags);
}

#define OPEN(name, folder_parameter, ...)                            \
  int name(folder_parameter const char *path, int flags, ...) {      \
    va_list rest;                                                    \
    va_start(rest, flags);                                           \
    mode_t mode = va_arg(rest, mode_t);                              \
    va_end(rest);                                                    \
    if (flags & (O_CREAT | O_TRUNC)) CHECK("open", path)             \
    return REAL(name)(__VA_ARGS__, flags, mode);                     \
  }
#define FOLDER int folder,
OPEN(open, , path)
OPEN(open64, , path)
OPEN(openat, FOLDER, folder, path)
OPEN(openat64, FOLDER, folder, path)
