package api

// Cache is the state of the registry cache.
type Cache struct {
	Enabled  bool         `json:"enabled"`
	MaxBytes int64        `json:"max_bytes" doc:"Maximum size of all objects together; 0 if the cache is off"`
	Use      []CacheUsage `json:"use" doc:"By kind of registry"`
}

// CacheUsage is the use of the registry cache by one kind of registry.
type CacheUsage struct {
	Kind    string `json:"kind" enum:"npm,pypi,go,apt,docker"`
	Objects int    `json:"objects"`
	Bytes   int64  `json:"bytes"`
}

// CacheCleared is what was removed from the registry cache.
type CacheCleared struct {
	Objects int   `json:"objects"`
	Bytes   int64 `json:"bytes"`
}
