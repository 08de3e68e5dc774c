/* File system calls that fail or end the process on demand, and a record of those that succeeded.
 *
 * Preloaded (LD_PRELOAD) into the process under test, it stands between libc's callers and libc: Python, torch, Rust and
 * C++ streams alike; not what libc calls within itself (fwrite). Only calls on paths that start with `under` count.
 * One fault at a time, set by faults_set().
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, FAIL_FROM, SIGNAL, COUNT };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char under[PATH_MAX], wanted[32], match[PATH_MAX];
static long nth, seen, value;
static int action, record = -1;

/* `op` "" is any that changes something; the `n`th (from 1) call of it on a path that holds `part` meets `act`: the error
 * `v`, from then on, or the signal `v`. `log`: of the record. */
void faults_set(const char *root, const char *op, const char *part, long n, int act, long v, const char *log) {
    pthread_mutex_lock(&lock);
    snprintf(under, sizeof under, "%s", root);
    snprintf(wanted, sizeof wanted, "%s", op);
    snprintf(match, sizeof match, "%s", part);
    nth = n, seen = 0, action = act, value = v;
    if (record >= 0) syscall(SYS_close, record);
    record = *log ? (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    pthread_mutex_unlock(&lock);
}

/* In one rank of a local job: the rule in the file that FAULTS names (rank, under, call, part, nth, action, value, a line each).
 * The file is removed, so that the next attempt of the job, or another command, meets no fault. */
__attribute__((constructor)) static void faults_from_file(void) {
    const char *name = getenv("FAULTS"), *rank = getenv("RANK");
    if (!name || !rank || !strstr(program_invocation_name, "python")) return;
    FILE *file = fopen(name, "r");
    if (!file) return;
    char line[7][PATH_MAX] = {{0}};
    for (int i = 0; i < 7 && fgets(line[i], PATH_MAX, file); i++) line[i][strcspn(line[i], "\n")] = 0;
    fclose(file);
    if (strcmp(rank, line[0])) return;
    syscall(SYS_unlink, name);
    faults_set(line[1], line[2], line[3], atol(line[4]), atoi(line[5]), atol(line[6]), "");
}

/* How many calls have counted since faults_set(). */
long faults_seen(void) { return seen; }

static void absolute(int dir, const char *path, char *out) {
    char folder[PATH_MAX] = "";
    if (path[0] != '/') {
        char link[64];
        if (dir == AT_FDCWD) {
            if (!getcwd(folder, sizeof folder)) folder[0] = 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
            ssize_t n = readlink(link, folder, sizeof folder - 1);
            folder[n > 0 ? n : 0] = 0;
        }
    }
    if (snprintf(out, PATH_MAX, "%s%s%s", folder, *folder ? "/" : "", path) >= PATH_MAX) out[0] = 0;
}

static int of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    out[n > 0 ? n : 0] = 0;
    return n > 0;
}

static int counts(const char *path) { return under[0] && !strncmp(path, under, strlen(under)); }

/* 0, or the error that the call has to return. */
static int before(const char *op, const char *path) {
    int other = *wanted ? strcmp(op, wanted) : !strcmp(op, "read");
    if (!action || other || !counts(path) || !strstr(path, match)) return 0;
    pthread_mutex_lock(&lock);
    long now = ++seen;
    pthread_mutex_unlock(&lock);
    if (action == SIGNAL && now == nth) {
        syscall(SYS_kill, getpid(), (int)value);
        while (value == SIGKILL) pause();
    }
    return action == FAIL_FROM && now >= nth ? (int)value : 0;
}

static void log_call(const char *op, const char *path, const char *other, long offset, const void *data, size_t n) {
    if (record < 0 || !(counts(path) || counts(other))) return;
    char head[2 * PATH_MAX + 64];
    int size = snprintf(head, sizeof head, "%s\t%s\t%s\t%ld\t%zu\n", op, path, other, offset, n);
    pthread_mutex_lock(&lock);
    syscall(SYS_write, record, head, size);
    for (size_t done = 0; done < n;) {
        long wrote = syscall(SYS_write, record, (const char *)data + done, n - done);
        if (wrote <= 0) break;
        done += wrote;
    }
    pthread_mutex_unlock(&lock);
}

#define REAL(name) ({ static typeof(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })
#define REFUSE(op, path) do { int e_ = before(op, path); if (e_) { errno = e_; return -1; } } while (0)

static int opened(int dir, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    absolute(dir, path, full);
    int writes = (flags & O_ACCMODE) != O_RDONLY;
    REFUSE(writes ? "open" : "read", full);
    struct stat st;
    int existed = writes && counts(full) && !stat(full, &st);
    int fd = (int)syscall(SYS_openat, dir, path, flags, mode);
    if (fd >= 0 && writes && (flags & O_CREAT) && !existed) log_call("create", full, "", 0, "", 0);
    else if (fd >= 0 && writes && (flags & O_TRUNC)) log_call("truncate", full, "", 0, "", 0);
    return fd;
}

#define MODE(flags) ({ mode_t m_ = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list a_; va_start(a_, flags); m_ = va_arg(a_, mode_t); va_end(a_); } m_; })
int open(const char *path, int flags, ...) { return opened(AT_FDCWD, path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { return opened(AT_FDCWD, path, flags, MODE(flags)); }
int openat(int dir, const char *path, int flags, ...) { return opened(dir, path, flags, MODE(flags)); }
int openat64(int dir, const char *path, int flags, ...) { return opened(dir, path, flags, MODE(flags)); }

static long position(int fd) {
    int flags = fcntl(fd, F_GETFL);
    struct stat st;
    if (flags >= 0 && (flags & O_APPEND) && !fstat(fd, &st)) return (long)st.st_size;
    return (long)lseek(fd, 0, SEEK_CUR);
}

ssize_t write(int fd, const void *data, size_t n) {
    char path[PATH_MAX];
    if (!under[0] || !of_fd(fd, path) || !counts(path)) return REAL(write)(fd, data, n);
    REFUSE("write", path);
    long at = position(fd);
    ssize_t wrote = REAL(write)(fd, data, n);
    if (wrote > 0) log_call("write", path, "", at, data, wrote);
    return wrote;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    if (!under[0] || !of_fd(fd, path) || !counts(path)) return REAL(writev)(fd, parts, count);
    ssize_t total = 0;
    for (int i = 0; i < count; i++) {
        ssize_t wrote = write(fd, parts[i].iov_base, parts[i].iov_len);
        if (wrote < 0) return total ? total : -1;
        total += wrote;
        if ((size_t)wrote < parts[i].iov_len) break;
    }
    return total;
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    char path[PATH_MAX];
    if (!under[0] || !of_fd(fd, path) || !counts(path)) return REAL(pwrite64)(fd, data, n, at);
    REFUSE("write", path);
    ssize_t wrote = REAL(pwrite64)(fd, data, n, at);
    if (wrote > 0) log_call("write", path, "", (long)at, data, wrote);
    return wrote;
}

/* Copies of files go through write(), so that they are seen: callers fall back to it. */
ssize_t sendfile64(int out, int in, off64_t *at, size_t n) {
    char path[PATH_MAX];
    if (!under[0] || !of_fd(out, path) || !counts(path)) return REAL(sendfile64)(out, in, at, n);
    errno = ENOTSOCK;
    return -1;
}
ssize_t sendfile(int out, int in, off_t *at, size_t n) { return sendfile64(out, in, at, n); }
ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t n, unsigned flags) {
    char path[PATH_MAX];
    if (!under[0] || !of_fd(out, path) || !counts(path)) return REAL(copy_file_range)(in, in_at, out, out_at, n, flags);
    errno = EXDEV;
    return -1;
}

ssize_t read(int fd, void *data, size_t n) {
    char path[PATH_MAX];
    if (action && under[0] && of_fd(fd, path) && counts(path)) REFUSE("read", path);
    return REAL(read)(fd, data, n);
}

static int synced(int fd, const char *op, int number) {
    char path[PATH_MAX];
    int known = under[0] && of_fd(fd, path) && counts(path);
    if (known) REFUSE("fsync", path);
    int result = (int)syscall(number, fd);
    if (known && !result) log_call(op, path, "", 0, "", 0);
    return result;
}
int fsync(int fd) { return synced(fd, "fsync", SYS_fsync); }
int fdatasync(int fd) { return synced(fd, "fsync", SYS_fdatasync); }

static int cut(int fd, off64_t size) {
    char path[PATH_MAX];
    int known = under[0] && of_fd(fd, path) && counts(path);
    if (known) REFUSE("write", path);
    int result = (int)syscall(SYS_ftruncate, fd, size);
    if (known && !result) log_call("truncate", path, "", (long)size, "", 0);
    return result;
}
int ftruncate64(int fd, off64_t size) { return cut(fd, size); }
int ftruncate(int fd, off_t size) { return cut(fd, size); }

static int renamed(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    absolute(from_dir, from, a);
    absolute(to_dir, to, b);
    REFUSE("rename", b);
    int result = (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
    if (!result) log_call("rename", a, b, 0, "", 0);
    return result;
}
int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int d, const char *from, int e, const char *to) { return renamed(d, from, e, to, 0); }
int renameat2(int d, const char *from, int e, const char *to, unsigned f) { return renamed(d, from, e, to, f); }

static int linked(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    char a[PATH_MAX], b[PATH_MAX];
    absolute(from_dir, from, a);
    absolute(to_dir, to, b);
    REFUSE("link", b);
    int result = (int)syscall(SYS_linkat, from_dir, from, to_dir, to, flags);
    if (!result) log_call("link", a, b, 0, "", 0);
    return result;
}
int link(const char *from, const char *to) { return linked(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int d, const char *from, int e, const char *to, int f) { return linked(d, from, e, to, f); }

static int removed(int dir, const char *path, int flags) {
    char full[PATH_MAX];
    absolute(dir, path, full);
    REFUSE("unlink", full);
    int result = (int)syscall(SYS_unlinkat, dir, path, flags);
    if (!result) log_call(flags & AT_REMOVEDIR ? "rmdir" : "unlink", full, "", 0, "", 0);
    return result;
}
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int dir, const char *path, int flags) { return removed(dir, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

static int made(int dir, const char *path, mode_t mode) {
    char full[PATH_MAX];
    absolute(dir, path, full);
    REFUSE("mkdir", full);
    int result = (int)syscall(SYS_mkdirat, dir, path, mode);
    if (!result) log_call("mkdir", full, "", 0, "", 0);
    return result;
}
int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int dir, const char *path, mode_t mode) { return made(dir, path, mode); }
