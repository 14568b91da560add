package server

import (
	"context"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/guestplane/regcache"
)

// Cache is the registry cache; *regcache.Service implements it.
type Cache interface {
	Status() (use []regcache.Usage, maxBytes int64)
	Clear(kind regcache.Kind) (regcache.Usage, error)
}

// cacheRoutes returns the routes for the registry cache.
func (s *Server) cacheRoutes() []route {
	const cache = "/v1/cache"
	return []route{
		{get, cache, AccessRead, "host.read", noTarget, anyOrigin, 200, "cache", "Show the use of the registry cache", call(s.cacheStatus)},
		{del, cache, AccessAdmin, "cache.clear", noTarget, anyOrigin, 200, "clear-cache", "Remove all objects of the registry cache", call(s.clearCache)},
		{del, cache + "/{kind}", AccessAdmin, "cache.clear", noTarget, anyOrigin, 200, "clear-cache-of", "Remove the objects of one kind of registry from the registry cache", call(s.clearCacheOf)},
	}
}

func (s *Server) cacheStatus(context.Context, *struct{}) (api.Cache, error) {
	use, maxBytes := s.cfg.Services.Cache.Status()
	out := api.Cache{Enabled: maxBytes > 0, MaxBytes: maxBytes, Use: []api.CacheUsage{}}
	for _, u := range use {
		out.Use = append(out.Use, api.CacheUsage{Kind: string(u.Kind), Objects: u.Objects, Bytes: u.Bytes})
	}
	return out, nil
}

type clearCacheInput struct {
	Kind string `path:"kind" enum:"npm,pypi,go,apt,docker" doc:"Kind of registry"`
}

func (s *Server) clearCache(context.Context, *struct{}) (api.CacheCleared, error) { return s.clear("") }

func (s *Server) clearCacheOf(_ context.Context, in *clearCacheInput) (api.CacheCleared, error) {
	return s.clear(in.Kind)
}

func (s *Server) clear(kind string) (api.CacheCleared, error) {
	gone, err := s.cfg.Services.Cache.Clear(regcache.Kind(kind))
	return api.CacheCleared{Objects: gone.Objects, Bytes: gone.Bytes}, err
}
